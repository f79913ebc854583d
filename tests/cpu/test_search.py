"""The search: ranked candidates, each of them a plan of its own."""

import pytest

from benchmarks.kernel_nets import NETS, chain, inception, lora
from dynaflow.costs import Cost, bound_us
from dynaflow.errors import OptionError
from dynaflow.memory import place
from dynaflow.search import NOISE, Candidate, noisy, search, settings
from dynaflow.simulate import Device, simulate
from dynaflow.strategies import Branches, Greedy
from dynaflow.verify import verify
from tests.cpu.kernels import kernels


def test_candidates_are_ranked_and_different():
    flow, costs = lora(1)
    found = search(flow, costs, max_streams=6)
    times = [round(c.simulated_us, 3) for c in found]
    assert times == sorted(times) and len({c.plan for c in found}) == len(found) > 5
    for left, right in zip(found, found[1:]):
        if round(left.simulated_us, 3) == round(right.simulated_us, 3):
            assert left.num_streams <= right.num_streams
    assert max(c.num_streams for c in found) <= 6


def test_times_are_those_of_the_costs_given_and_plans_verify():
    flow, costs = lora(1)
    found = search(flow, costs, max_streams=4)
    assert any(c.noise for c in found)
    for c in found:
        assert c.simulated_us == simulate(flow, c.plan, costs).total_us >= bound_us(flow, costs)
        verify(place(flow, c.plan), flow)


@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
def test_the_first_is_as_good_as_any_setting_alone(make):
    flow, costs = make()
    found = search(flow, costs, max_streams=4)
    assert found[0].simulated_us == min(c.simulated_us for c in found)
    one = next(c for c in found if c.num_streams == 1)
    assert found[0].simulated_us <= one.simulated_us


def test_a_chain_is_left_on_one_stream():
    found = search(*chain(20), max_streams=8)
    assert found[0].num_streams == 1 and isinstance(found[0].strategy, Branches)


def test_it_knows_the_device():
    """Where an event costs 30 us, kernels of 5 us stay together."""
    flow, costs = kernels({"a": (5.0, 0.1, []), "b": (5.0, 0.1, ["a"]), "c": (5.0, 0.1, ["a"]), "d": (5.0, 0.1, ["b", "c"])})
    assert search(flow, costs, device=Device(1.0, 30.0))[0].num_streams == 1
    assert search(flow, costs, device=Device(1.0, 1.0))[0].num_streams == 2


def test_one_stream_only():
    flow, costs = inception()
    assert {c.num_streams for c in search(flow, costs, max_streams=1)} == {1}


def test_settings_hold_the_trials_rule_and_priorities():
    tried = [strategy for strategy, _ in settings(8)]
    assert {s.num_streams for s in tried} == {1, 2, 3, 4, 6, 8} and any(isinstance(s, Greedy) for s in tried)
    assert any(isinstance(s, Branches) and s.prioritised for s in tried)


def test_noise_is_small_and_the_same_every_time():
    costs = {f"k{i}": Cost(10.0, 0.3) for i in range(50)}
    once = noisy(costs, 1)
    assert once == noisy(costs, 1) != noisy(costs, 2) and {c.share for c in once.values()} == {0.3}
    assert all(10.0 * (1 - NOISE) <= c.us <= 10.0 * (1 + NOISE) for c in once.values())


def test_a_candidate_says_what_it_is():
    flow, costs = kernels({"a": (5.0, 0.1, [])})
    first = search(flow, costs)[0]
    assert isinstance(first, Candidate) and str(first).startswith("5.0 us on 1 stream: Branches(")


def test_rejects_costs_that_leave_an_op_out():
    flow, costs = kernels({"a": (5.0, 0.1, []), "b": (5.0, 0.1, [])})
    with pytest.raises(OptionError, match="1 of 2 ops of kernels have no cost: b"):
        search(flow, {"a": costs["a"]})
