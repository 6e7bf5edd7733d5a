from atoll.controller_process.step_budget import FLUSH_SECONDS, StepBudget
from atoll.protocol.events import STEPS_PER_FLUSH


def test_steps_that_take_long_are_done_in_smaller_numbers():
    budget = StepBudget()
    budget.observe(8 * FLUSH_SECONDS)
    assert budget.steps == STEPS_PER_FLUSH // 8
    for _ in range(10):
        budget.observe(8 * FLUSH_SECONDS)
    assert budget.steps >= 1


def test_steps_that_take_little_are_done_in_the_usual_number_again():
    budget = StepBudget()
    for _ in range(10):
        budget.observe(8 * FLUSH_SECONDS)
    for _ in range(20):
        budget.observe(FLUSH_SECONDS / 4)
    assert budget.steps == STEPS_PER_FLUSH
