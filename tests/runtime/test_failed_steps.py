"""A step in which every episode failed ends the run: nothing could be learnt from it."""

import pytest

from megarl.runtime.samples import refuse_failed_step
from megarl.system.errors import MegarlError


def test_a_step_in_which_every_episode_failed_ends_the_run():
    with pytest.raises(MegarlError, match="the environment failed in all 8 episodes of step 3"):
        refuse_failed_step(3, {"env/errors": 8.0})


@pytest.mark.parametrize("numbers", [{"env/errors": 0.0}, {"env/errors": 4.0, "env/turns/mean": 1.0}])
def test_other_steps_do_not(numbers):
    refuse_failed_step(3, numbers)
