"""Rewards that look at images, and the forms of answers that recipes of vision-language models score."""

import json
import textwrap
from contextlib import closing

import numpy as np
import pytest

from megarl.checks.checklist import Checklist
from megarl.checks.files import check_reward
from megarl.config.data import RewardConfig
from megarl.config.load import load_config
from megarl.data.batch import Batch
from megarl.data.fields import PATCHES
from megarl.data.image_set import image_fields, patches_of
from megarl.data.images import resized
from megarl.rewards import REWARDS, Rewards
from megarl.rewards.images import encoded, packed, unpacked, with_images
from megarl.rewards.preflight import check_import
from megarl.runtime.stages.reward import _images
from megarl.system.errors import ConfigError, RewardError
from tests.data.test_images import SETTINGS, picture

CODE = """
def red(samples, images, scale=1.0):
    return [{"overall": scale * sum(i.getpixel((0, 0))[0] for i in own), "n": len(own)} for own in images]

def may_look(samples, images=None):
    return [float(images is None)] * len(samples)

def trl(completions, images, **kwargs):
    return [float(len(own) == 2 and own[0].size[0] > 1) for own in images]

def keep(function):
    return function

@keep
def decorated(samples, images):
    return [0.0] * len(samples)

def one_image(sample, images):
    return float(images[0].width)

def blind(samples):
    return [float("images" in s) for s in samples]

def compute_score(reward_inputs, format_weight=0.5):
    return [{"overall": (1 - format_weight) * (r["response"] == r["ground_truth"]), "accuracy": 1.0,
             "length": r["response_length"]} for r in reward_inputs]

def compute_one(reward_input, format_weight=0.5):
    return {"overall": float(reward_input["response"] == reward_input["ground_truth"])}
"""
PIXELS = [resized(picture(seed=seed), SETTINGS) for seed in range(2)]
SAMPLES = [
    {"uid": str(i), "prompt": "?", "response": "5", "answer": "5", "ground_truth": "5", "response_length": 1, "row": {}}
    for i in range(3)
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(textwrap.dedent(CODE))
    return path


def scored(cfg, images):
    with closing(Rewards(cfg)) as rewards:
        return rewards.result(rewards.submit(SAMPLES, images))


def test_functions_that_ask_get_the_images_and_others_do_not(file):
    parts = {name: {"name": f"{file}:{name}"} for name in ("red", "trl", "blind")}
    parts["one_image"] = {"name": f"{file}:one_image", "mode": "sequential"}
    cfg = RewardConfig(parts=parts, timeout_s=60)
    images = encoded([[(1, PIXELS[0])], [(2, PIXELS[1]), (1, PIXELS[0])], [(1, PIXELS[0])]])
    reds = [int(pixels[0, 0, 0]) for pixels in PIXELS]
    results = scored(cfg, images)
    assert [one["red"] for one in results] == [reds[0], sum(reds), reds[0]]
    assert [one["red/n"] for one in results] == [1, 2, 1]
    assert [one["trl"] for one in results] == [0, 1, 0]
    assert [one["blind"] for one in results] == [0, 0, 0]
    assert [one["one_image"] for one in results] == [PIXELS[0].shape[1], PIXELS[1].shape[1], PIXELS[0].shape[1]]


@pytest.mark.parametrize("name", ["red", "trl"])
def test_a_function_that_asks_where_there_are_none_says_so(file, name):
    with pytest.raises(RewardError, match=r"set data\.image_key"):
        scored(RewardConfig(name=f"{file}:{name}", timeout_s=60), None)
    assert scored(RewardConfig(name=f"{file}:may_look", timeout_s=60), None)[0]["overall"] == 1.0


@pytest.mark.parametrize("name", ["red", "trl"])
def test_a_function_that_asks_where_there_are_none_is_refused_before_a_start(file, name):
    """Whatever the rows are: those of the quickstart come from a function, which is not called then."""
    config = load_config("grpo_quickstart", [f"reward=!replace {{name: '{file}:{name}'}}"])
    checks = Checklist()
    check_reward(config, checks)
    (failed,) = [check for check in checks.items if check.status == "fail"]
    assert failed.key == "data.image_key"
    assert f"{name} requires images" in str(failed.problem())


def test_a_decorated_function_that_asks_is_refused_when_it_is_imported(file):
    with pytest.raises(ConfigError, match=r"data\.image_key: .*decorated requires images"):
        check_import(RewardConfig(name=f"{file}:decorated"), limit_s=60, images=False)
    check_import(RewardConfig(name=f"{file}:decorated"), limit_s=60)


def test_the_images_of_samples_are_those_that_the_model_sees():
    rows = [[picture(seed=0)], [], [picture(seed=1), picture(seed=0)]]
    patches = [[patches_of(one, SETTINGS, None, "a row") for one in own] for own in rows]
    samples = Batch(image_fields(patches, [[0] * len(own) for own in rows], SETTINGS), {"uid": ["a", "b", "c"]})
    assert PATCHES in samples

    class Asks:
        uses_images = True

    class Blind:
        uses_images = False

    found = with_images([{"images": own} for own in _images(Asks(), samples)])
    for own, images in zip(rows, found, strict=True):
        want = [resized(one, SETTINGS) for one in own]
        assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(want, images["images"], strict=True))
    assert found[0]["images"][0] is found[2]["images"][1], "decoded once"
    assert _images(Blind(), samples) is None


def test_a_message_holds_each_image_once():
    samples = [{"images": ["a", "b"]}, {"response": "text"}, {"images": ["b"]}]
    message = json.loads(json.dumps(packed(samples)))
    assert message["images"] == ["a", "b"]
    assert unpacked(message) == samples


@pytest.mark.parametrize("name", ["compute_score", "compute_one"])
def test_functions_of_easyr1_are_called_as_there(file, name):
    results = scored(RewardConfig(name=f"{file}:{name}", kwargs={"format_weight": 0.0}, timeout_s=60), None)
    assert [one["overall"] for one in results] == [1.0, 1.0, 1.0]


def test_answers_in_tags_are_mathematics():
    def math(response, answer="1/2"):
        return REWARDS.get("math")({"response": response, "answer": answer}, method="answer")["overall"]

    assert math("<think>2</think><answer> 0.5 </answer>") == 1.0
    assert math(r"<answer>3</answer> no: <answer>\boxed{\frac12}</answer>") == 1.0
    assert math("<answer>0.5</answer> and </answer>") == 1.0
    assert math("0.5") == math(r"\boxed{0.5}") == math("<answer>0.4</answer>") == math("0.5</answer>") == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<answer>b</answer>", 0.0),
    ],
)
def test_the_form_of_an_answer_in_tags(response, score):
    assert REWARDS.get("format")({"response": response, "prompt": ""}, boxed=False, answer=True) == score
