"""ResNet and AlexNet with batch normalization, as Keras models.

`factory.create` builds a network by name. This file imports nothing, so that `depths` and `moments`
can be used without TensorFlow.
"""
