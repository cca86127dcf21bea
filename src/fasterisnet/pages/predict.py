"""python predict.py MODEL.onnx IMAGE...   what the network sees in each image; needs onnxruntime and pillow."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

if len(sys.argv) < 3:
    sys.exit(__doc__)
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
for path in sys.argv[2:]:
    try:
        image = ImageOps.exif_transpose(Image.open(path))
    except OSError as error:
        sys.exit(f"{path} cannot be read: {error}")
    if image.mode[0] in "IF":
        sys.exit(f"{path} has more than 8 bits; make it 8 bits with the window of the training first")
    image = ImageOps.equalize(image.convert("RGB")) if about["equalise"] else image.convert("RGB")
    side = [max(image.size)] * 2 if about["fit"] == "pad" else image.size
    square = Image.new("RGB", (side[0], side[1]))
    square.paste(image, ((side[0] - image.width) // 2, (side[1] - image.height) // 2))
    x = np.asarray(square.resize((about["size"], about["size"]), Image.Resampling.BILINEAR), np.float32) / 255
    x = x if about["channels"] == 3 else x @ np.array([[0.2989], [0.587], [0.114]], np.float32)
    x = (x - about["mean"]) / about["std"] if about["mean"] else x
    logits = np.asarray(session.run(None, {"images": np.asarray(x, np.float32).transpose(2, 0, 1)[None]})[0])[0]
    odds = np.exp(logits - logits.max())
    chances = 1 / (1 + np.exp(-logits)) if about["multi_label"] else odds / odds.sum()
    print(path, *(f"{about['classes'][i]}={chances[i]:.4f}" for i in chances.argsort()[::-1]))
