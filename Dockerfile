# The application in a container. An image with NVIDIA's libraries, which also runs without a GPU:
#   docker build -t lit_knn .
#   docker run --gpus all --volume "$PWD:/app" lit_knn fit -c demo
# A smaller image for CPUs alone takes PyTorch from the index of its CPU wheels, see pytorch.org/get-started:
#   docker build --build-arg TORCH_INDEX=ADDRESS -t lit_knn:cpu .
# The tests do not build this file.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim
ARG TORCH_INDEX=""
WORKDIR /src
COPY requirements.lock ./
RUN pip install --no-cache-dir --constraint requirements.lock ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch torchvision
COPY . .
RUN pip install --no-cache-dir --constraint requirements.lock '.[all]'
# Runs, data and own files are in the folder that is mounted here.
WORKDIR /app
ENTRYPOINT ["lit-knn"]
CMD ["--help"]
