"""How many steps a quantum has, by the time that steps took."""

import pytest

from linpix.server.engine.schedule.quantum import QUANTUM_S, QuantumLength


def test_a_quantum_is_one_stride_until_a_step_was_measured():
    assert QuantumLength(4, 256).steps(16) == 4


@pytest.mark.parametrize(("step_s", "steps"), [
    (QUANTUM_S / 10, 8), (QUANTUM_S / 100, 100), (QUANTUM_S / 1000, 256), (2 * QUANTUM_S, 4)])
def test_it_has_as_many_whole_strides_as_fit_in_its_time_and_at_least_one(step_s, steps):
    length = QuantumLength(4, 256)
    length.learn(16, step_s)
    assert length.steps(16) == steps


def test_a_size_that_was_not_measured_is_taken_from_the_next_smaller_one():
    length = QuantumLength(1, 1000)
    length.learn(1, QUANTUM_S / 800)
    length.learn(4, QUANTUM_S / 400)
    assert length.steps(5) == 400, "sizes are powers of two"
    assert length.steps(16) == 100, "as if each image cost the same"
    assert length.steps(2) == 400


def test_a_step_s_time_is_smoothed():
    length = QuantumLength(1, 1000)
    length.learn(8, QUANTUM_S / 100)
    length.learn(8, QUANTUM_S / 50)
    assert length.steps(8) == int(100 / 1.3)
