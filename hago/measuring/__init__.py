"""Measuring: what a CPU takes for the ops of its hardware file, on the machine that this runs on."""
