"""The report on a search or a strategy: one self-contained HTML page, and the JSON document that it is made of.

`records` reads logs, strategies and fronts; `gather` makes a `document.Report` of them with the model and the data;
`page` makes the page of that document; `live` keeps the page of a running search current.
"""

from hago.report.commands import python_commands
from hago.report.document import Command, Report
from hago.report.gather import POINTS, CommandsOf, ReportOptions, Source, gather_report
from hago.report.live import LiveReport
from hago.report.page import page_of, save_page
from hago.report.records import RecordLike, Records, read_records

__all__ = [
    "POINTS",
    "Command",
    "CommandsOf",
    "LiveReport",
    "RecordLike",
    "Records",
    "Report",
    "ReportOptions",
    "Source",
    "gather_report",
    "page_of",
    "python_commands",
    "read_records",
    "save_page",
]
