"""Looking: inspect, explain, compare, report, and time the figures of a hardware file on this machine."""
