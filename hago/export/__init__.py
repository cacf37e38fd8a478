"""Export: strategies and integer models in the forms that other tools read."""
