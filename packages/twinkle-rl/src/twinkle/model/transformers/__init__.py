"""What is particular to TransformersModel, under the documented names."""
