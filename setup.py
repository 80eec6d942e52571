"""The compiled part of the package; everything else is in pyproject.toml.

It is optional: without a C compiler the build goes on, and rows are copied by numpy.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvstore.device._rows",
            ["kvstore/device/_rows.c"],
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
