"""The version of hago, in one place."""

VERSION = "0.1.0"
