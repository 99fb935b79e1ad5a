"""Fine-tune an encoder on labels, and predict the classes of images."""
