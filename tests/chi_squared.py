"""Exact probabilities of sampling, by definition, and the chi-squared test of draws against them."""

import numpy as np
from scipy.stats import chisquare

BOUND = 1e-3  # of the p-value


def exactly(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities of the tokens in float64: sorted, each rule after the one before it."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    order = np.argsort(-p, kind="stable")
    p = p[order] / p.sum()
    if top_k:
        p[top_k:] = 0
        p /= p.sum()
    p[np.cumsum(p) - p >= top_p] = 0
    p /= p.sum()
    p[p < min_p * p[0]] = 0
    out = np.zeros(len(p))
    out[order] = p / p.sum()
    return out


def pvalue(draws, exact):
    """Of the hypothesis that tokens were drawn with these probabilities; 0 if a forbidden one was. Rare tokens, of
    which fewer than five are expected, are counted together."""
    counts, expected = np.bincount(draws, minlength=len(exact)), exact * len(draws)
    if counts[exact == 0].sum() > 0:
        return 0.0
    rare = (expected < 5) & (exact > 0)
    often = expected >= 5
    found, awaited = list(counts[often]), list(expected[often])
    if expected[rare].sum() > 0:
        found, awaited = [*found, counts[rare].sum()], [*awaited, expected[rare].sum()]
    return chisquare(found, awaited).pvalue
