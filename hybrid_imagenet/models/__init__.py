"""ResNet and AlexNet with batch normalization, as Keras models."""
