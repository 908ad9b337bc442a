"""Language models that learn by playing: rollouts, StarPO optimizers, training, teaching and evaluation."""
