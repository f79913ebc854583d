import logging

import pytest

from dynaflow.integrations.step_trials import NUM_STEPS, Trials, kind_of

LOG = logging.getLogger("toy.dynaflow")
PREFILL = kind_of("prefill", 1000)


class Device:
    """Steps that take what they are said to take."""

    def __init__(self, us_in_parts, us_whole, added_up=lambda numbers: numbers):
        self.now, self.us, self.ways = 0.0, {True: us_in_parts, False: us_whole}, set()
        self.trials = Trials("toy", LOG, added_up, mark=lambda: self.now)

    def steps(self, num, kind=PREFILL, num_tokens=1000):
        """Whether each of them ran in parts."""
        found = []
        for _ in range(num):
            in_parts = self.trials.wants_parts(kind)
            with self.trials.timed(kind, num_tokens, in_parts):
                compiling_us = 0.0 if (kind, in_parts) in self.ways else 1e6
                self.now += (self.us[in_parts] * num_tokens + compiling_us) * 1e-6
            self.ways.add((kind, in_parts))
            found.append(in_parts)
        return found


@pytest.mark.parametrize("us_in_parts, is_split", [(7.0, True), (9.7, True), (9.9, False), (12.0, False)])
def test_the_faster_way_wins_after_turns(us_in_parts, is_split):
    num_turns = 2 * (NUM_STEPS + 1)
    assert Device(us_in_parts, 10.0).steps(30) == [True, False] * (num_turns // 2) + [is_split] * (30 - num_turns)


def test_steps_of_other_kinds_have_turns_of_their_own():
    device = Device(7.0, 10.0)
    device.steps(20)
    device.us[True] = 12.0
    assert device.steps(20, kind_of("mixed", 1000))[-1] is False and device.steps(20, kind_of("prefill", 2000), 2000)[-1] is False
    assert all(device.steps(5)), "a verdict stands"
    assert kind_of("prefill", 512) == kind_of("prefill", 1023) != kind_of("prefill", 1024)


def test_time_is_counted_per_token():
    device = Device(9.0, 10.0)
    for _ in range(NUM_STEPS + 1):  # whole steps have fewer tokens, and are over sooner
        assert [*device.steps(1, num_tokens=1000), *device.steps(1, num_tokens=600)] == [True, False]
    assert device.trials.wants_parts(PREFILL)


def test_all_ranks_are_added_up():
    """The other rank was slower in parts than this one was faster."""
    assert Device(7.0, 10.0, lambda numbers: [numbers[0] + 20.0, numbers[1] + 10.0, numbers[2] + 2.0, 2.0]).steps(20)[-1] is False


def test_a_kind_that_cannot_be_run_in_parts_is_given_up():
    trials = Trials("toy", LOG, lambda numbers: numbers, mark=lambda: 0.0)
    for _ in range(NUM_STEPS + 1):
        assert trials.wants_parts(PREFILL)
        trials.refused(PREFILL)
        with trials.timed(PREFILL, 1000, False):
            pass
    assert not trials.wants_parts(PREFILL)


def test_steps_that_cannot_be_run_in_parts_do_not_speak_for_others():
    """Of one kind, some have too few tokens, or no place to cut: before and behind the verdict."""
    device = Device(7.0, 10.0)
    for number in range(2 * (NUM_STEPS + 1)):
        if number % 3 == 0:
            device.trials.refused(PREFILL)
        device.steps(1)
    assert device.steps(1) == [True]
    for _ in range(NUM_STEPS + 2):
        device.trials.refused(PREFILL)
    assert device.steps(5) == [True] * 5


@pytest.mark.parametrize("gain, is_split", [(0.85, True), (1.15, False)])
def test_what_changes_from_step_to_step_changes_for_both(gain, is_split):
    """A load that gets heavier, by far more than the two ways differ."""
    device = Device(0.0, 0.0)
    for number in range(2 * (NUM_STEPS + 1)):
        us = 10.0 * 1.3 ** (number // 2)
        device.us = {True: us * gain, False: us}
        device.steps(1)
    assert device.steps(1) == [is_split]


def test_mixed_steps_are_told_apart_by_what_they_mostly_are():
    assert kind_of("mixed", 1000, "prefill") != kind_of("mixed", 1000, "decode")
    assert kind_of("prefill", 1000, "prefill") == PREFILL


def test_a_step_that_fails_does_not_count():
    trials = Trials("toy", LOG, lambda numbers: numbers, mark=lambda: 0.0)
    assert trials.wants_parts(PREFILL)
    with pytest.raises(RuntimeError), trials.timed(PREFILL, 1000, True):
        raise RuntimeError
    assert trials.wants_parts(PREFILL)
