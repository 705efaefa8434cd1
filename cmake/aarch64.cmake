# A toolchain file: compile for aarch64 on another processor, with the packages gcc-aarch64-linux-gnu and
# g++-aarch64-linux-gnu of Debian (`make wheel ARCH=aarch64`).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
