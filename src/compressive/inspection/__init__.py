"""What is in a folder of images: duplicates, leaks, outliers, clusters and likely label errors."""
