"""Large-batch ResNet-50 training on ImageNet with hybrid gradient computing."""

__version__ = "0.1.0"
