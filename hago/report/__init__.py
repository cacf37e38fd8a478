"""The report on a search or a strategy: one self-contained HTML page, and the JSON document that it is made of.

`records` reads logs, strategies and fronts; `gather` makes a `document.Report` of them with the model and the data;
`page` makes the page of that document; `live` keeps the page of a running search current.
"""

from hago.report.document import Command, Report
from hago.report.gather import CommandsOf, ReportOptions, Source, make_report
from hago.report.records import RecordLike, Records, read_records

__all__ = [
    "Command",
    "CommandsOf",
    "RecordLike",
    "Records",
    "Report",
    "ReportOptions",
    "Source",
    "make_report",
    "read_records",
]
