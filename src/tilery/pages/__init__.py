"""What stored runs are shown as: the report, plots, comparisons, summaries."""
