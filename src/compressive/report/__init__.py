"""Runs as one page to look at, from the files of their folders alone."""

from compressive.report.page import write_report as write_report
