"""The reference of `test_posterior.py`: the same model by a Markov chain, which knows nothing of conjugacy.

Random-walk Metropolis over log-ratios, from the likelihood, the flat prior and the Jacobian; run once:
    python tests/evaluation/mcmc_reference.py
"""

from __future__ import annotations

import numpy as np

CONFUSION = [[50, 3, 2], [4, 40, 6], [1, 5, 30]]
CHAINS, STEPS, DROPPED, STEP_SIZE, SEED = 256, 20_000, 2_000, 0.45, 7


def shares(coordinates: np.ndarray) -> np.ndarray:
    """From two free numbers to three shares."""
    whole = np.concatenate([coordinates, np.zeros((*coordinates.shape[:-1], 1))], -1)
    exponential = np.exp(whole - whole.max(-1, keepdims=True))
    return exponential / exponential.sum(-1, keepdims=True)


def log_density(coordinates: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Multinomial likelihood, times a prior density of 1, times the Jacobian of `shares` (their product)."""
    log = np.log(shares(coordinates))
    return (counts * log).sum(-1) + log.sum(-1)


def main() -> None:
    counts = np.array(CONFUSION, dtype=np.float64)
    blocks = np.concatenate([counts.sum(1)[None], counts])  # class prior, three rows
    generator = np.random.default_rng(SEED)
    state = generator.normal(size=(CHAINS, 4, 2))
    density = log_density(state, blocks)
    kept: list[np.ndarray] = []
    accepted = 0.0
    for step in range(STEPS):
        proposal = state + STEP_SIZE * generator.normal(size=state.shape)
        proposed = log_density(proposal, blocks)
        take = np.log(generator.random(density.shape)) < proposed - density
        state, density = np.where(take[..., None], proposal, state), np.where(take, proposed, density)
        accepted += take.mean() / STEPS
        if step >= DROPPED and step % 10 == 0:
            found = shares(state)
            prior, rows = found[:, 0], found[:, 1:]
            joint = prior[:, :, None] * rows
            hit, said = np.einsum("nii->ni", joint), joint.sum(1)
            values = [
                hit / said, np.einsum("nii->ni", rows), 1 - (said - hit) / (1 - prior), 2 * hit / (prior + said)
            ]  # fmt: skip
            kept.append(np.concatenate([*values, hit.sum(1)[:, None]], 1))
    drawn = np.stack(kept, 1)  # (chain, draw, number)
    numbers = drawn.reshape(-1, drawn.shape[-1])
    print(f"{len(numbers):,} draws, accepted {accepted:.2f}")
    error = drawn.mean(1).std(0) / np.sqrt(CHAINS)
    names = [f"{m} {c}" for m in ("precision", "recall", "specificity", "f1") for c in range(3)] + ["accuracy"]
    for i, name in enumerate(names):
        ordered = np.sort(numbers[:, i])
        held = int(np.ceil(0.95 * len(ordered)))
        first = int((ordered[held - 1 :] - ordered[: len(ordered) - held + 1]).argmin())
        low, high = ordered[first], ordered[first + held - 1]
        mean, sd = numbers[:, i].mean(), numbers[:, i].std()
        print(f'    "{name}": ({mean:.5f}, {sd:.5f}, {low:.4f}, {high:.4f}),  # error of the mean {error[i]:.5f}')


if __name__ == "__main__":
    main()
