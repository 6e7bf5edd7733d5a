from tests.frontends.ifrt.rig import rig

__all__ = ["rig"]
