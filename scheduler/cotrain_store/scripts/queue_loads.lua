-- queue_loads: what waits and runs in a pool for each of these tenants, five numbers each in a row (ops, tokens, bytes,
-- samples waiting, samples running), as one JSON text: a client reads that ten times as fast as as many answers. Reads only.
local args = cjson.decode(ARGV[1])
local numbers = {}
local function add(counts)
  for _, count in ipairs(counts) do
    numbers[#numbers + 1] = tonumber(count or 0)
  end
end
for _, tenant in ipairs(args.tenants) do
  add(redis.call('HMGET', args.prefix .. 'queue:' .. tenant, 'ops', 'tokens', 'bytes'))
  add(redis.call('HMGET', args.prefix .. 'samples:' .. tenant, 'waiting', 'running'))
end
return cjson.encode(numbers)
