"""Report: one HTML page about runs, from the files of their folders, without torch."""

from compressive.reporting.page import write_report as write_report
