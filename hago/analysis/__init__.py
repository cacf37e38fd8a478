"""Reports on models and strategies: inspection, explanation, comparison, and timing of a CPU's hardware file."""
