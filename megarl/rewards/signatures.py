"""Calling conventions of users' reward functions, recognised by the names of the parameters.

    def score(samples)                                 # a list of samples, or one with reward.mode: sequential
    def score(prompts, completions, answer, **kwargs)  # TRL: lists, and columns of the data by name
    def score(data_source, solution_str, ground_truth, extra_info=None)  # verl: one sample
    def score(reward_inputs)                           # EasyR1: as the first; reward_input: one sample

Each may be `async`, and may take `images`: the images of the sample, or a list of those per sample.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Sample = dict[str, Any]


@dataclass(frozen=True)
class Convention:
    """A convention for calling a reward function.

    Attributes:
        owner: trainer with this convention, for messages; empty: this project.
        mark: parameter that identifies the convention.
        given: parameters that the convention fills, in addition to columns of the data.
        unknown: parameters that the other trainer fills and that do not exist here.
        batch: whether arguments are lists over the samples instead of values of one sample.
    """

    owner: str = ""
    mark: str = ""
    given: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    batch: bool = True


OWN = Convention()
TRL = Convention(
    "TRL", "completions", ("prompts", "completions"), ("completion_ids", "completions_ids", "trainer_state")
)
VERL = Convention("verl", "solution_str", ("data_source", "solution_str", "ground_truth", "extra_info"), batch=False)
#: First parameter of EasyR1's functions that take one sample, whatever `reward.mode` is.
ONE_SAMPLE = "reward_input"
#: Parameter through which a function gets the images of samples.
IMAGES = "images"
_NO_IMAGES = "the function uses images, but the recipe names no column of images: set data.image_key"
#: Conventions of other trainers, for messages.
OTHER_FORMS = "fn(completions, **kwargs), fn(prompts, completions, answer, ...), fn(solution_str, ground_truth, ...)"


def form_of(signature: inspect.Signature) -> Convention:
    """Return the calling convention (TRL's, verl's or megarl's own) of a reward function with this signature."""
    return next((form for form in (TRL, VERL) if form.mark in signature.parameters), OWN)


def settings_of(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters that `reward.kwargs` fills: the parameters after the samples, or all that the convention
    does not fill."""
    form, parameters = form_of(signature), list(signature.parameters.values())
    filled = set(form.given) | set(form.unknown) if form is not OWN else {p.name for p in parameters[:1]}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in parameters if p.kind in named and p.name not in filled | {IMAGES}]


def columns_of(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the columns of the data that a function of another trainer's convention requires."""
    if form_of(signature) is OWN:
        return []
    return [p.name for p in settings_of(signature) if p.default is p.empty and p.name not in kwargs]


def uses_images(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function uses the images of samples: it has the parameter `images`, and no setting fills it."""
    return IMAGES in signature.parameters and IMAGES not in kwargs


def requires_images(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function cannot be called without the images of samples."""
    return uses_images(signature, kwargs) and signature.parameters[IMAGES].default is inspect.Parameter.empty


def bind(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if a function cannot be called with `reward.kwargs`, whatever the columns of the data."""
    form = form_of(signature)
    images: dict[str, Any] = {IMAGES: []} if uses_images(signature, kwargs) else {}
    if form is OWN:
        signature.bind(None, **images, **kwargs)
        return
    unfilled = [n for n, p in signature.parameters.items() if n in form.unknown and p.default is p.empty]
    if unfilled:
        raise TypeError(f"nothing provides a value for {', '.join(unfilled)}: give it a default, or remove it")
    filled = [*form.given, *columns_of(signature, kwargs)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = {name: None for name in filled if takes_any or name in signature.parameters}
    signature.bind(**given, **images, **kwargs)


def adapt(function: Callable[..., Any], signature: inspect.Signature, mode: str) -> Callable[..., Any]:
    """Return the function in the form `(samples, **kwargs)`, or `(sample, **kwargs)` in mode `sequential`."""
    form = form_of(signature)
    if form is OWN:
        return _own(function, signature, mode)
    if not form.batch:

        def one(sample: Sample, **kwargs: Any) -> Any:
            result = _awaited(function(**_arguments(form, signature, [sample], kwargs)))
            if not isinstance(result, dict) or "score" not in result or "overall" in result:
                return result
            names = {"score": "overall", "pred": "extracted"}  # verl's name of a part -> megarl's name
            return {names.get(name, name): value for name, value in result.items()}

        return one if mode == "sequential" else lambda samples, **kwargs: [one(sample, **kwargs) for sample in samples]

    def call(samples: list[Sample], **kwargs: Any) -> Any:
        arguments = _arguments(form, signature, samples, kwargs)
        try:
            return _awaited(function(**arguments))
        except (AttributeError, TypeError) as error:
            if any(kind in str(error) for kind in ("'list'", "'dict'", "list indices", "string ind", "'str'")):
                talks = any(sample.get("messages") is not None for sample in samples)
                error.add_note(
                    'prompts are messages here, so each completion is a list of messages: c[0]["content"] is its text'
                    if talks
                    else "prompts are text here, so that each completion is text, not a list of messages"
                )
            raise

    return call if mode == "batch" else lambda sample, **kwargs: call([sample], **kwargs)[0]


def _own(function: Callable[..., Any], signature: inspect.Signature, mode: str) -> Callable[..., Any]:
    """Return a function of this project's or EasyR1's convention in the form in which the scorer calls it."""
    single = next(iter(signature.parameters), "") == ONE_SAMPLE

    def call(first: Any, **kwargs: Any) -> Any:
        images = {}
        has_images = IMAGES in (first[0] if isinstance(first, list) else first)
        if uses_images(signature, kwargs) and (has_images or requires_images(signature, kwargs)):
            images = {IMAGES: list(map(_images, first)) if isinstance(first, list) else _images(first)}
        return _awaited(function(first, **images, **kwargs))

    if single and mode == "batch":
        return lambda samples, **kwargs: [call(sample, **kwargs) for sample in samples]
    return call


def _images(sample: Sample) -> list[Any]:
    """Return the images of a sample. Raise ValueError if the recipe has no images."""
    if IMAGES not in sample:
        raise ValueError(_NO_IMAGES)
    return list(sample[IMAGES])


def _arguments(
    form: Convention, signature: inspect.Signature, samples: Sequence[Sample], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a function's arguments by another trainer's convention, from columns and `reward.kwargs`, or raise
    ValueError."""
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    columns = dict.fromkeys(name for sample in samples for name in _columns(sample))
    wanted = [*form.given, *columns] if takes_any else [n for n in parameters if n in columns or n in form.given]
    arguments: dict[str, Any] = {}
    for name in wanted:
        if name not in kwargs and name not in arguments:
            values = [_value(form, name, sample) for sample in samples]
            arguments[name] = values if form.batch else values[0]
    missing = [n for n in columns_of(signature, kwargs) if n not in arguments]
    if IMAGES not in arguments and requires_images(signature, kwargs):
        raise ValueError(_NO_IMAGES)
    if missing:
        raise ValueError(
            f"the function requires {', '.join(missing)}, which is neither a column of the data "
            f"({', '.join(columns)}) nor in reward.kwargs"
        )
    return {**arguments, **kwargs}


def _columns(sample: Sample) -> dict[str, Any]:
    """Return the columns of the sample's row, together with its answer, data source and images."""
    answer = {"answer": sample["answer"]} if sample.get("answer") is not None else {}
    source = {"data_source": sample["data_source"]} if "data_source" in sample else {}
    images = {IMAGES: sample[IMAGES]} if IMAGES in sample else {}
    return {**answer, **source, **sample.get("row", {}), **images}


def _value(form: Convention, name: str, sample: Sample) -> Any:
    messages = sample.get("messages")
    if form is TRL and name == "completions":
        return sample["response"] if messages is None else [{"role": "assistant", "content": sample["response"]}]
    if form is TRL and name == "prompts":
        column = sample.get("row", {}).get("prompt")
        return messages or (column if isinstance(column, str) else sample["prompt"])
    if form is VERL and name == "solution_str":
        return sample["response"]
    if form is VERL and name == "ground_truth":
        return sample["answer"]
    return _columns(sample).get(name)


def _awaited(result: Any) -> Any:
    """Return a function's result, after running an `async` result to its end."""
    if not inspect.isawaitable(result):
        return result

    async def finish() -> Any:
        return await result

    return asyncio.run(finish())
