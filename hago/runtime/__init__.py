"""The Plan as an integer model: the reference, the native engine, stored models, and what equal means."""
