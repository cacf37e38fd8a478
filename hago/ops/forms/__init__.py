"""Forms: how other engines compute an operator of `hago.ops` in integers; hardware files name them."""
