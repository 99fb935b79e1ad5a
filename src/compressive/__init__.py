"""Measure and control how much information a visual representation keeps."""
