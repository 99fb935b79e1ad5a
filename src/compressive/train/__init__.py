"""Pretraining."""

from compressive.train.loop import pretrain as pretrain
