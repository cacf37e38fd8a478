"""One search of one model on one chip: prepare, measure sensitivities, refine thresholds, evaluate, replay."""
