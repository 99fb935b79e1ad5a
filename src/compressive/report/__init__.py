"""Report: one HTML page about runs, from the files of their folders, without torch."""

from compressive.report.page import write_report as write_report
