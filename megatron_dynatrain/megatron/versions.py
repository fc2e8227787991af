"""Which Megatron this package was checked against."""

from megatron_dynatrain.errors import UnsupportedMegatron

SUPPORTED = ((0, 19),)  # (major, minor) of megatron-core


def check(package_info) -> None:
    """Raise UnsupportedMegatron unless `megatron.core.package_info` names a supported release."""
    found = (package_info.MAJOR, package_info.MINOR)
    if found not in SUPPORTED:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise UnsupportedMegatron(f"megatron-core {package_info.__version__} was found, but megatron_dynatrain was checked "
                                  f"against {known} only; install one of these, or launch without megatron_dynatrain")
