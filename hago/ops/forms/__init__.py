"""Forms: how other engines compute an operator of `hago.ops` in integers; hardware files name them.

One module per engine; `requantizing` has the parts that several share.
"""
