"""The search loop, which knows no Plan: trials, log, budget, resume, and the protocol of a searcher."""
