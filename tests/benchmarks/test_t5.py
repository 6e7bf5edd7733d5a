import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import child
from benchmarks.harness.backends import environment_of
from benchmarks.harness.benchmark import Benchmark, Settings
from benchmarks.paper import t5
from benchmarks.paper.table1 import QUICK, make_batches
from tests.quick_xla import quick

pytestmark = pytest.mark.slow

SOME = t5.Config(d_model=16, d_ff=32, d_kv=4, heads=2, layers=1, vocabulary=64)
TABLE1 = Benchmark("table 1", "T5", "benchmarks.paper.table1:prepare", metrics=())


@pytest.fixture(scope="module")
def weights() -> t5.Weights:
    return jax.jit(lambda: t5.first_weights(SOME, seed=0))()


logits = jax.jit(t5.logits)


def some_tokens(batch: int, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, SOME.vocabulary, (batch, length), dtype=np.int32)


@pytest.mark.parametrize(
    ("config", "millions"),
    [(t5.SMALL, 60.5), (t5.BASE, 222.9), (t5.LARGE, 737.7), (t5.T5_3B, 2850), (t5.T5_11B, 11300)],
)
def test_the_published_models_have_their_published_sizes(config: t5.Config, millions: float):
    assert t5.parameters(config) == pytest.approx(1e6 * millions, rel=0.002)


def test_a_steps_operations_are_those_that_xla_counts():
    inputs, targets = (jax.ShapeDtypeStruct((8, length), jnp.int32) for length in (128, 64))
    weights = jax.eval_shape(lambda: t5.first_weights(t5.SMALL, seed=0))
    counted = jax.jit(jax.value_and_grad(t5.loss)).lower(weights, inputs, targets).cost_analysis()["flops"]
    assert t5.step_flops(t5.SMALL, 8, inputs=128, targets=64) == pytest.approx(counted, rel=0.01)


def test_the_encoders_buckets_distinguish_the_keys_behind_from_those_ahead():
    buckets = t5.relative_buckets(200, 200, both_ways=True)
    behind = {0: 0, 1: 1, 7: 7, 8: 8, 11: 8, 12: 9, 16: 10, 32: 12, 64: 14, 127: 15, 128: 15, 199: 15}
    assert {distance: buckets[199, 199 - distance] for distance in behind} == behind
    ahead = {1: 17, 7: 23, 8: 24, 11: 24, 12: 25, 16: 26, 32: 28, 64: 30, 127: 31, 199: 31}
    assert {distance: buckets[0, distance] for distance in ahead} == ahead


def test_the_decoders_buckets_are_all_for_the_keys_behind():
    buckets = t5.relative_buckets(200, 200, both_ways=False)
    behind = {0: 0, 1: 1, 15: 15, 16: 16, 18: 16, 19: 17, 32: 21, 64: 26, 127: 31, 128: 31, 199: 31}
    assert {distance: buckets[199, 199 - distance] for distance in behind} == behind
    assert not buckets[0].any()


@pytest.mark.thorough
def test_a_target_does_not_reach_the_logits_of_its_own_or_of_earlier_places(weights: t5.Weights):
    inputs, targets = some_tokens(2, 8, seed=1), some_tokens(2, 6, seed=2)
    changed = targets.copy()
    changed[:, 3] = 2 + (changed[:, 3] - 1) % (SOME.vocabulary - 2)
    before, after = (np.asarray(logits(weights, inputs, each)) for each in (targets, changed))
    assert before.dtype == np.float32
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(axis=-1).all()


def test_every_input_reaches_every_logit(weights: t5.Weights):
    inputs, targets = some_tokens(2, 8, seed=1), some_tokens(2, 6, seed=2)
    changed = inputs.copy()
    changed[:, -1] = 2 + (changed[:, -1] - 1) % (SOME.vocabulary - 2)
    before, after = (np.asarray(logits(weights, each, targets)) for each in (inputs, changed))
    assert (before != after).any(axis=-1).all()


def test_the_targets_are_the_last_inputs_backwards():
    for inputs, targets in make_batches(QUICK):
        np.testing.assert_array_equal(targets, np.flip(inputs[:, -QUICK.targets :], axis=1))


@pytest.mark.slow
@pytest.mark.thorough
def test_atolls_losses_are_those_of_stock_jax_bit_for_bit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child, "environment_of", lambda settings: quick(environment_of(settings)))
    losses = {}
    for backend in ("atoll", "stock"):
        with child.Child(TABLE1, Settings(backend, quick=True)) as contestant:
            measured = contestant.measure()
        losses[backend] = (measured["loss_sum"], measured["last_loss"])
    assert losses["atoll"] == losses["stock"]
