"""The names that recipes are checked against are those that the registries hold."""

from megarl.checks.settings import ESTIMATORS, GROUP_ESTIMATORS, KL_ESTIMATORS, OPTION_READERS


def test_estimators():
    from megarl.algorithms.advantages import ADVANTAGES

    assert sorted(ADVANTAGES.names()) == sorted(ESTIMATORS)


def test_group_estimators_are_those_that_know_singletons():
    import inspect

    from megarl.algorithms.advantages import ADVANTAGES

    grouped = [n for n in ADVANTAGES.names() if "allow_singleton" in inspect.signature(ADVANTAGES.get(n)).parameters]
    assert sorted(grouped) == sorted(GROUP_ESTIMATORS)


def test_options_are_read_by_the_estimators_whose_signature_has_them():
    import inspect

    from megarl.algorithms.advantages import ADVANTAGES
    from megarl.config.algorithm import AdvantageConfig

    signatures = {name: inspect.signature(ADVANTAGES.get(name)).parameters for name in ESTIMATORS}
    options = set(AdvantageConfig.model_fields) - {"name"}
    readers = {option: {name for name in ESTIMATORS if option in signatures[name]} for option in options}
    assert {option: set(names) for option, names in OPTION_READERS.items()} == readers


def test_kl_estimators():
    from megarl.algorithms.kl import KL

    assert sorted(KL.names()) == sorted(KL_ESTIMATORS)
