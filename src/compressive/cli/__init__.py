"""The command line. Nothing here imports torch before options and settings are checked."""
