"""von Mises-Fisher and uniform distributions on the sphere, and their special functions."""
