_current_platform = None


def __getattr__(name):
    if name == "current_platform":
        return _current_platform
    raise AttributeError(name)
