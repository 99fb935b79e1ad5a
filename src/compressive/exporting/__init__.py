"""Export an encoder to other formats and compare its features with the original."""
