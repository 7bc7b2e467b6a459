"""What runs in the interpreter of a simulator, which may know nothing of megarl: standard library, numpy, itself."""
