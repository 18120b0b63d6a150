"""OpenAI's and Anthropic's endpoints: conversion of text around the generation of tokens."""
