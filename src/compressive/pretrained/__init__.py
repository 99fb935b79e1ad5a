"""Weights to start from or to evaluate: ours, timm's, torchvision's, DINO's, MoCo's and others."""
