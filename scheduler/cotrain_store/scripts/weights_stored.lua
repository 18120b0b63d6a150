-- weights_stored: mark weights as stored: their files are durable, so any worker can read them now.
-- This publishes the result of a named save. It also publishes its checkpoint, unless a later save of the same name
-- was stored first. The weights of a save without a name count as its sampler's.
-- Fenced by the worker's epoch. The first digest is kept.
-- needs: fence, weights_release, checkpoint_index, save_end, samplers, counts, webhook_event
-- `args.checkpoint` and its result are the unpublished ones of the save, with the size filled in.
local prefix, ref, size, result = args.prefix, args.ref, args.size, ARGV[2]
local weights = 'cotrain:weights:' .. ref

redis.call('SREM', prefix .. 'unstored:' .. args.worker, ref)
local row = redis.call('HMGET', weights, 'digest', 'checkpoint', 'ttl', 'record')
if not row[1] then
  return 'GONE'
end
if row[1] ~= '' then
  return 'OK'
end
redis.call('HSET', weights, 'digest', args.digest, 'size', size, 'optimizer', args.optimizer)
redis.call('SADD', prefix .. 'content:' .. args.digest, ref)
release_weights(ref) -- its name may refer to other weights, or its sampler may have ended
if args.optimizer ~= '' then
  redis.call('SADD', prefix .. 'optimizer:' .. args.optimizer, ref)
end
if row[2] then
  local record = cjson.decode(args.checkpoint)
  local member = member_of(record)
  local pending = 'cotrain:checkpoint:' .. member .. ':pending'
  local seq = redis.call('ZSCORE', pending, ref)
  if seq then -- no later save of this name is stored: it would have deleted this entry
    redis.call('ZREMRANGEBYSCORE', pending, '-inf', seq)
    write_checkpoint(args.checkpoint, record)
    queue_event(record.tenant, 'checkpoint.saved', {
      training_run_id = record.run, tinker_path = 'tinker://' .. member, size_bytes = size,
    })
  end
  add_usage(args.usage, args.used, 1, args.usage_ttl_s)
  end_save(prefix, ref, record, result, row[3], args.closing)
else
  local tenant = cjson.decode(row[4]).tenant
  for _, user in ipairs(redis.call('SMEMBERS', weights .. ':users')) do
    if string.sub(user, 1, 2) == 's:' then
      record_sampler_bytes(tenant, string.sub(user, 3), size)
    end
  end
end
return 'OK'
