"""The Plan on float carriers, and the values that a trial need not compute again."""
