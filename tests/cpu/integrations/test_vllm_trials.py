import pytest

from dynaflow.integrations.vllm_trials import NUM_STEPS, Trials, kind_of

PREFILL = kind_of("prefill", 1000)


class Device:
    """Steps that take what they are said to take."""

    def __init__(self, us_in_parts, us_whole, added_up=lambda numbers: numbers):
        self.now, self.us, self.ways = 0.0, {True: us_in_parts, False: us_whole}, set()
        self.trials = Trials(added_up, mark=lambda: self.now)

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
    assert Device(7.0, 10.0, lambda numbers: [numbers[0] + 20.0, numbers[1] + 10.0]).steps(20)[-1] is False


def test_what_cannot_be_run_in_parts_is_not_tried_again():
    device = Device(7.0, 10.0)
    assert device.steps(1) == [True]
    device.trials.give_up(PREFILL)
    assert device.steps(20) == [False] * 20


def test_a_step_that_fails_does_not_count():
    trials = Trials(lambda numbers: numbers, mark=lambda: 0.0)
    assert trials.wants_parts(PREFILL)
    with pytest.raises(RuntimeError), trials.timed(PREFILL, 1000, True):
        raise RuntimeError
    assert trials.wants_parts(PREFILL)
