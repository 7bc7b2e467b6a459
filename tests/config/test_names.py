"""The names that recipes are checked against are those that the registries hold."""

from megarl.config.checks_settings import ESTIMATORS, GROUP_ESTIMATORS, KL_ESTIMATORS, LOSSES


def test_estimators():
    from megarl.algorithms.advantages import ADVANTAGES

    assert sorted(ADVANTAGES.names()) == sorted(ESTIMATORS)


def test_group_estimators_are_those_that_know_singletons():
    import inspect

    from megarl.algorithms.advantages import ADVANTAGES

    grouped = [n for n in ADVANTAGES.names() if "allow_singleton" in inspect.signature(ADVANTAGES.get(n)).parameters]
    assert sorted(grouped) == sorted(GROUP_ESTIMATORS)


def test_losses():
    from megarl.algorithms.losses import POLICY_LOSSES

    assert sorted(POLICY_LOSSES.names()) == sorted(LOSSES)


def test_kl_estimators():
    from megarl.algorithms.kl import KL

    assert sorted(KL.names()) == sorted(KL_ESTIMATORS)
