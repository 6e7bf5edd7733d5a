from tests.ifrt.rig import rig

__all__ = ["rig"]
