-- weights_stored: the files of weights are durable: any worker can read them now.
-- A named save gets its name and its result with that, unless a later save of it was faster; the
-- weights of one without a name count as its sampler's.
-- Fenced by the worker's epoch. The first digest stays.
local epoch_key, weights, content, unstored = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local optimizers, notify, usage = KEYS[5], KEYS[6], KEYS[7]
local epoch, ref, digest, size, optimizer = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local prefix, text, result, closing = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local used, usage_ttl_s = ARGV[10], ARGV[11]

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
redis.call('SREM', unstored, ref)
local row = redis.call('HMGET', weights, 'digest', 'checkpoint', 'ttl', 'record')
if not row[1] then
  return 'GONE'
end
if row[1] ~= '' then
  return 'OK'
end
redis.call('HSET', weights, 'digest', digest, 'size', size, 'optimizer', optimizer)
redis.call('SADD', content, ref)
if optimizer ~= '' then
  redis.call('SADD', optimizers, ref)
end
if row[2] then
  local record = cjson.decode(text)
  local member = record.run .. '/' .. record.kind .. '/' .. record.name
  local pending = 'cotrain:checkpoint:' .. member .. ':pending'
  local seq = redis.call('ZSCORE', pending, ref)
  if seq then -- no later save of this name is stored: that would have taken this one off the list
    redis.call('ZREMRANGEBYSCORE', pending, '-inf', seq)
    write_checkpoint(text, record)
  end
  add_usage(usage, used, 1, usage_ttl_s)
  end_save(weights, ref, record, prefix, result, row[3], notify, closing)
else
  local tenant = cjson.decode(row[4]).tenant
  for _, user in ipairs(redis.call('SMEMBERS', weights .. ':users')) do
    if string.sub(user, 1, 2) == 's:' then
      note_sampler_bytes(tenant, string.sub(user, 3), size)
    end
  end
end
return 'OK'
