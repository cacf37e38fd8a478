"""How other engines compute an operator: forms of the operators next door, named by hardware files."""
